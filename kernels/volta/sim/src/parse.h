// From a disassembly to instructions.
#ifndef VOLTA_SIM_PARSE_H
#define VOLTA_SIM_PARSE_H

#include <cstdint>
#include <string>

#include "instruction.h"

namespace volta_sim {

// One operand as nvdisasm writes it, like "-|R4.reuse|", "c[0x0][0x160]" or "[R2.X4+0x10]".
Operand parse_operand(const std::string& text, NumberFormat format);

// listing: lines "/*0010*/ @!P0 IADD3 R0, R1, R2, RZ ;" in order of their addresses; others are skipped. code: the
// instructions themselves, for the control bits that the text does not show. What cannot be executed is refused when it
// is to be executed, not here.
Program parse(const std::string& listing, const uint8_t* code, uint64_t code_bytes);

}  // namespace volta_sim

#endif
