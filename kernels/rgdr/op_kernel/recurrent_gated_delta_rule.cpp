// The entry that the build compiles once for each combination of types that the op definition lists; the compiler
// defines DTYPE_<INPUT> for it.
#include "recurrent_gated_delta_rule.h"

extern "C" __global__ __aicore__ void recurrent_gated_delta_rule(
    GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR beta, GM_ADDR state, GM_ADDR actual_seq_lengths,
    GM_ADDR ssm_state_indices, GM_ADDR g, GM_ADDR gk, GM_ADDR num_accepted_tokens, GM_ADDR out, GM_ADDR state_out,
    GM_ADDR workspace, GM_ADDR tiling) {
    (void)workspace;
#if defined(__CCE_AICORE__) && __CCE_AICORE__ == 220
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);  // 910B has its vector cores apart; 310P has no such choice
#endif
    REGISTER_TILING_DEFAULT(RecurrentGatedDeltaRuleTilingData);
    GET_TILING_DATA_WITH_STRUCT(RecurrentGatedDeltaRuleTilingData, tilingData, tiling);
    AscendC::TPipe pipe;
    rgdr::RecurrentGatedDeltaRule<DTYPE_QUERY, DTYPE_ACTUAL_SEQ_LENGTHS, DTYPE_SSM_STATE_INDICES> op;
    op.Init(query, key, value, beta, state, actual_seq_lengths, ssm_state_indices, g, gk, num_accepted_tokens, out,
            state_out, tilingData, &pipe);
    op.Process();
}
