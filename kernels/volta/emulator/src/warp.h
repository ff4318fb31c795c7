// What the lanes of a warp do together, once all of them are there.
#ifndef VOLTA_EMULATOR_WARP_H
#define VOLTA_EMULATOR_WARP_H

#include "block.h"

namespace volta_emulator {

void execute(Warp& warp);

}  // namespace volta_emulator

#endif
