// Aligned, uninitialised memory for workers: one block each, allocated once per op call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace dmattn::cpu {

class Scratch {
 public:
  Scratch(int64_t workers, size_t bytes_each) : stride_((bytes_each + 63) / 64 * 64 + 64) {
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, stride_ * static_cast<size_t>(workers))));
    if (!memory_) throw std::bad_alloc();
  }
  void* of(int64_t worker) const { return memory_.get() + static_cast<size_t>(worker) * stride_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t stride_;
  std::unique_ptr<char, Free> memory_;
};

}  // namespace dmattn::cpu
