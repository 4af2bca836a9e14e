#!/bin/sh
# Builds the op package with CANN: build.sh [ascend310p|ascend910b], then installs it if INSTALL_TO is set.
# Nothing here has run yet: no machine with CANN was at hand (see README.md, "Not run on hardware").
set -eu

unit="${1:-ascend310p}"
case "$unit" in
    ascend310p | ascend910b) ;;
    *) echo "unknown compute unit '$unit': ascend310p or ascend910b" >&2; exit 2 ;;
esac
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    echo "ASCEND_HOME_PATH is not set: source set_env.sh of CANN first" >&2
    exit 2
fi

cd "$(dirname "$0")"
cmake --preset "$unit"
cmake --build "build/$unit" --target binary -j"$(nproc)"
cmake --build "build/$unit" --target package -j"$(nproc)"

package=$(ls "build/$unit"/custom_opp_*.run)
echo "built $package"
if [ -n "${INSTALL_TO:-}" ]; then
    "./$package" --install-path="$INSTALL_TO"
    echo "in every terminal that converts or runs: export ASCEND_CUSTOM_OPP_PATH=$INSTALL_TO/vendors/qwen_npu"
fi
