"""One sequence on several ranks: exact attention to contiguous chunks, with only those keys in transit that some query still sees.

Rank r holds the queries, keys and values of chunk r. In a call

1. ranks compare the metadata of their calls (:mod:`.agreement`), so that a rank that was called differently is an error on every rank and
   not a hang. Values of tensors that have to be equal are compared on the device (:mod:`.values`); deterministic is not compared. A rank
   that fails tells the others (:mod:`.failures`);
2. with scores, all scores are gathered and every rank selects for the whole sequence, so all ranks know its mask. A given mask is known;
3. every rank tells from the mask which rows of key and value each rank needs from each other one (:mod:`.needs`);
4. these rows move (:mod:`.exchange`) into slots in front of the rank's own keys, and the ordinary op computes attention to both.

In backward the gradients of rows return the same way. Two ranks with scores take a shorter way in place of steps 2 to 4 (:mod:`.pair`): one
message.
"""

from dmattn.distributed.attention import context_parallel_attention
from dmattn.distributed.traffic import Traffic, record_traffic

__all__ = ["Traffic", "context_parallel_attention", "record_traffic"]
