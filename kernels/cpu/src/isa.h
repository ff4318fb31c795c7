// The kernels that are compiled in, and the one in use.
#ifndef FASTATTENTION_ISA_H
#define FASTATTENTION_ISA_H

#include <string>
#include <vector>

#include "kernel.h"

namespace fastattention {

// Kernels usable on this machine (instructions and operating-system support), best first. Never empty, because scalar
// always runs.
const std::vector<const KernelTable*>& usable_kernels();
const char* usable_isas();  // their names, comma-separated

const KernelTable& active_kernel();
bool activate_kernel(const std::string& name);  // false: it is not usable

}  // namespace fastattention

#endif
