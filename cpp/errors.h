// How a check fails: with an exception whose text says which argument, what was expected and what it got. No torch.
#pragma once

#include <sstream>
#include <stdexcept>

namespace dmattn {

template <class... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "dmattn: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <class... Parts>
inline void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

}  // namespace dmattn
