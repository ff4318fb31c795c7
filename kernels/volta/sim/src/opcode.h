// All opcodes that can be executed. Each family's table is at the end of its execute_*.cpp.
#ifndef VOLTA_SIM_OPCODE_H
#define VOLTA_SIM_OPCODE_H

#include <string>
#include <vector>

#include "instruction.h"

namespace volta_sim {

const std::vector<Opcode>& control_opcodes();
const std::vector<Opcode>& float_opcodes();
const std::vector<Opcode>& half_opcodes();
const std::vector<Opcode>& integer_opcodes();
const std::vector<Opcode>& memory_opcodes();
const std::vector<Opcode>& tensor_opcodes();
const std::vector<Opcode>& warp_opcodes();

// Null if the opcode is unknown.
const Opcode* find_opcode(const std::string& name);

// Whether the opcode supports this modifier.
bool allows(const Opcode& opcode, const std::string& modifier);

const char* pipe_name(int pipe);

}  // namespace volta_sim

#endif
