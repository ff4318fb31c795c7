// Memory that outlives a CTA: host arrays mapped at device addresses, and constant banks.
#ifndef VOLTA_SIM_MEMORY_H
#define VOLTA_SIM_MEMORY_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace volta_sim {

constexpr int kNumConstantBanks = 8;
constexpr int kBankOfGlobals = 4;  // addresses of __device__ variables

class GlobalMemory {
 public:
  void map(uint64_t address, uint64_t bytes, void* host, bool writable);
  void unmap_all() { ranges_.clear(); }
  // The host memory of [address, address + bytes), or null with the reason in `why`.
  uint8_t* find(uint64_t address, uint32_t bytes, bool writing, const char** why);

 private:
  struct Range {
    uint64_t begin, end;
    uint8_t* host;
    bool writable;
  };
  std::vector<Range> ranges_;
  size_t last_ = 0;  // index of the range that was accessed last
};

class ConstantMemory {
 public:
  void set(int bank, const void* data, uint64_t bytes);
  // Loads up to 4 bytes into the lowest bytes of the result.
  uint32_t load(int bank, uint32_t offset, uint32_t bytes) const;

 private:
  std::array<std::vector<uint8_t>, kNumConstantBanks> banks_;
};

}  // namespace volta_sim

#endif
