// The host tiling of the op: what it refuses, and how it cuts the work.
#pragma once

#include <cstdio>

#include "register/op_def_registry.h"

// Where the reason of a refusal goes.
#ifndef RGDR_REPORT
#define RGDR_REPORT(node, text) std::fprintf(stderr, "%s: %s\n", node, text)
#endif

namespace optiling {

// The order of the op definition.
enum RgdrInput { QUERY, KEY, VALUE, BETA, STATE, LENGTHS, INDICES, G, GK, ACCEPTED };
enum RgdrAttribute { SCALE, USE_PAD_SLOT, PAD_SLOT };

ge::graphStatus TileRecurrentGatedDeltaRule(gert::TilingContext* context);

}  // namespace optiling
