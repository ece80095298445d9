// The launches of selection, packing, lists of keys and the indexer's loss: params in, work enqueued on a stream. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../params.h"

namespace dmattn::cuda {

// partial_counts: int32 [batch, heads, Nq] scratch, partial tiles of each row of tiles.
cudaError_t launch_pack_tiles(const PackParams& p, int32_t* partial_counts, cudaStream_t stream);
cudaError_t launch_pack_bits(const PackParams& p, cudaStream_t stream);

// workspace: select_workspace_bytes(p) bytes of scratch.
size_t select_workspace_bytes(const SelectParams& p);
cudaError_t launch_select(const SelectParams& p, void* workspace, cudaStream_t stream);

// workspace: 2 * index_loss_stride(p) numbers of p's type for each query of each group.
cudaError_t launch_index_loss(const IndexLossParams& p, void* workspace, cudaStream_t stream);

}  // namespace dmattn::cuda
