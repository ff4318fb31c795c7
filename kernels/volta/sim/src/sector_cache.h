// The 32-byte sectors that L1 holds: fully associative, with replacement of the least recently used sector.
#ifndef VOLTA_SIM_SECTOR_CACHE_H
#define VOLTA_SIM_SECTOR_CACHE_H

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>

namespace volta_sim {

class SectorCache {
 public:
  explicit SectorCache(size_t sectors) : capacity_(sectors) {}

  // Returns whether the sector was present, and makes it the most recently used one.
  bool touch(uint64_t sector) {
    const auto found = where_.find(sector);
    if (found != where_.end()) {
      by_age_.splice(by_age_.begin(), by_age_, found->second);
      return true;
    }
    by_age_.push_front(sector);
    where_[sector] = by_age_.begin();
    if (where_.size() > capacity_) {
      where_.erase(by_age_.back());
      by_age_.pop_back();
    }
    return false;
  }

 private:
  size_t capacity_;
  std::list<uint64_t> by_age_;  // the most recently used first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where_;
};

}  // namespace volta_sim

#endif
