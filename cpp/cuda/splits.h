// How decoding cuts the keys of a sequence: sizes that the host plans with and kernels have room for. Plain C++.
//
// A split is added up from nothing, and splits are added up as a tree: in pairs, pairs in pairs, and so on. So the result does
// not depend on how many neighbouring splits a block takes, as long as that is a power of two, and blocks may follow the batch
// and the device.
#pragma once

namespace dmattn::cuda {

inline constexpr int kLeastSplitKeys = 128, kMostSplitKeys = 2048;
inline constexpr int kMostBlockSplits = 32;  // of one block
inline constexpr int kMostParts = (1 << 20) / kMostSplitKeys;
inline constexpr int kMostClusterParts = 16;

inline constexpr int kMostFewRows = 16;  // up to so many rows of a key head are one tile; blocks of more form no clusters

}  // namespace dmattn::cuda
