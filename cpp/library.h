// The ops library as a file: only the first copy of it in a process registers ops and kernels.
#pragma once

namespace dmattn {

// Whether this copy is the one that registers. False where another file with the same ops came before it; stderr then names both.
bool is_first_copy();

}  // namespace dmattn
