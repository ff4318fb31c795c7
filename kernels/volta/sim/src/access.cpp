#include "access.h"

#include <algorithm>

namespace volta_sim {
namespace {

constexpr int kBanks = 32;
constexpr uint32_t kSectorBytes = 32, kSectorsPerLine = 4;

// The maximum number of distinct words that lanes [begin, end) access in one bank.
uint32_t passes(uint32_t lanes, const std::array<uint32_t, kLanes>& addresses, int words, int begin, int end) {
  constexpr int kMaxWords = kLanes * 4;
  uint32_t wanted[kMaxWords];
  int count = 0;
  for (int lane = begin; lane < end; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    for (int word = 0; word < words; ++word) {
      wanted[count++] = addresses[static_cast<size_t>(lane)] / 4 + static_cast<uint32_t>(word);
    }
  }
  std::sort(wanted, wanted + count);
  const auto* last = std::unique(wanted, wanted + count);
  uint32_t of_bank[kBanks] = {}, most = 0;
  for (const auto* word = wanted; word != last; ++word) most = std::max(most, ++of_bank[*word % kBanks]);
  return most;
}

}  // namespace

Access shared_access(uint32_t lanes, const std::array<uint32_t, kLanes>& addresses, int width) {
  const int words = std::max(1, width / 4), group = kLanes / words;
  Access access;
  for (int begin = 0; begin < kLanes; begin += group) {
    access.wavefronts += passes(lanes, addresses, words, begin, begin + group);
  }
  access.wavefronts = std::max(access.wavefronts, 1u);
  return access;
}

Access global_access(uint32_t lanes, const std::array<uint64_t, kLanes>& addresses, std::vector<uint64_t>& sectors) {
  uint64_t touched[kLanes];  // an aligned access is within one sector
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) != 0) touched[count++] = addresses[static_cast<size_t>(lane)] / kSectorBytes;
  }
  std::sort(touched, touched + count);
  count = static_cast<int>(std::unique(touched, touched + count) - touched);
  Access access;
  access.wavefronts = 1;
  access.first_sector = static_cast<uint32_t>(sectors.size());
  access.num_sectors = static_cast<uint32_t>(count);
  for (int i = 0; i < count; ++i) {
    sectors.push_back(touched[i]);
    if (i == 0 || touched[i] / kSectorsPerLine != touched[i - 1] / kSectorsPerLine) ++access.num_lines;
  }
  return access;
}

}  // namespace volta_sim
