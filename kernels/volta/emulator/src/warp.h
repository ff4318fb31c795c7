// Performs an operation that all lanes of a warp have arrived at.
#ifndef VOLTA_EMULATOR_WARP_H
#define VOLTA_EMULATOR_WARP_H

#include "block.h"

namespace volta_emulator {

void execute(Warp& warp);

}  // namespace volta_emulator

#endif
