// Computes problems that test_cpu_neon.py has written to files, in place. A file is the struct and then what it points
// to; pointers are offsets into the file. Usage: neon_runner ISA FILE...
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "fastattention_cpu.h"

template <typename T>
static void relocate(T*& pointer, char* base) {
  if (pointer != nullptr) pointer = reinterpret_cast<T*>(base + reinterpret_cast<uintptr_t>(pointer));
}

int main(int count, char** arguments) {
  if (fa_cpu_set_num_threads(2, nullptr, 0) != FA_OK || fa_cpu_set_isa(arguments[1]) != FA_OK) {
    std::puts(fa_cpu_last_error());
    return 1;
  }
  for (int i = 2; i < count; ++i) {
    std::ifstream in(arguments[i], std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    auto problem = *reinterpret_cast<const fa_attention_problem*>(bytes.data());
    char* base = bytes.data();
    relocate(problem.query_start_loc, base);
    relocate(problem.seq_lens, base);
    relocate(problem.block_table, base);
    relocate(problem.kv_start_loc, base);
    relocate(problem.alibi_slopes, base);
    relocate(problem.sinks, base);
    relocate(problem.query, base);
    relocate(problem.key, base);
    relocate(problem.value, base);
    relocate(problem.key_factors, base);
    relocate(problem.value_factors, base);
    relocate(problem.out, base);
    relocate(problem.lse, base);
    if (fa_cpu_attention(&problem) != FA_OK) {
      std::printf("%s: %s\n", arguments[i], fa_cpu_last_error());
      return 1;
    }
    std::ofstream(arguments[i], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  std::printf("%s of %s\n", fa_cpu_isa(), fa_cpu_usable_isas());
  return 0;
}
