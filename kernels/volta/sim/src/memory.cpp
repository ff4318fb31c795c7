#include "memory.h"

#include <cinttypes>
#include <cstring>

#include "failure.h"

namespace volta_sim {

void GlobalMemory::map(uint64_t address, uint64_t bytes, void* host, bool writable) {
  if (bytes == 0) return;
  const uint64_t end = address + bytes;
  if (end < address)
    fail("a range of %" PRIu64 " bytes at 0x%" PRIx64 " does not fit the address space.", bytes, address);
  for (const Range& range : ranges_) {
    if (address < range.end && range.begin < end) {
      fail("the range 0x%" PRIx64 "..0x%" PRIx64 " overlaps 0x%" PRIx64 "..0x%" PRIx64 ", which is mapped already.",
           address, end, range.begin, range.end);
    }
  }
  ranges_.push_back({address, end, static_cast<uint8_t*>(host), writable});
}

uint8_t* GlobalMemory::find(uint64_t address, uint32_t bytes, bool writing, const char** why) {
  if (address % bytes != 0) {
    *why = "is not a multiple of the access's size";
    return nullptr;
  }
  const auto holds = [&](const Range& range) { return address >= range.begin && address + bytes <= range.end; };
  if (last_ >= ranges_.size() || !holds(ranges_[last_])) {
    for (last_ = 0; last_ < ranges_.size() && !holds(ranges_[last_]);) ++last_;
    if (last_ == ranges_.size()) {
      *why = "is not mapped";
      return nullptr;
    }
  }
  if (writing && !ranges_[last_].writable) {
    *why = "is mapped for reading only";
    return nullptr;
  }
  return ranges_[last_].host + (address - ranges_[last_].begin);
}

void ConstantMemory::set(int bank, const void* data, uint64_t bytes) {
  if (bank < 0 || bank >= kNumConstantBanks) fail("there is no constant bank %d.", bank);
  const auto* begin = static_cast<const uint8_t*>(data);
  banks_[static_cast<size_t>(bank)].assign(begin, begin + bytes);
}

uint32_t ConstantMemory::load(int bank, uint32_t offset, uint32_t bytes) const {
  if (bank < 0 || bank >= kNumConstantBanks) fail("there is no constant bank %d.", bank);
  const auto& content = banks_[static_cast<size_t>(bank)];
  if (bank == kBankOfGlobals && content.empty()) fail("variables in global memory are not implemented.");
  if (uint64_t{offset} + bytes > content.size()) {
    fail("constant c[0x%x][0x%x] lies outside of the bank's %zu bytes.", bank, offset, content.size());
  }
  uint32_t value = 0;
  std::memcpy(&value, content.data() + offset, bytes);
  return value;
}

}  // namespace volta_sim
