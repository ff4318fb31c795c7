// Turns a disassembly into instructions.
#ifndef VOLTA_SIM_PARSE_H
#define VOLTA_SIM_PARSE_H

#include <cstdint>
#include <string>

#include "instruction.h"

namespace volta_sim {

// Parses one operand as nvdisasm writes it, for example "-|R4.reuse|", "c[0x0][0x160]" or "[R2.X4+0x10]".
Operand parse_operand(const std::string& text, NumberFormat format);

// listing: lines like "/*0010*/ @!P0 IADD3 R0, R1, R2, RZ ;", ordered by address; other lines are skipped. code: the
// machine code, for the control bits that the text does not show. An instruction that cannot be executed causes an
// error only when it is executed.
Program parse(const std::string& listing, const uint8_t* code, uint64_t code_bytes);

}  // namespace volta_sim

#endif
