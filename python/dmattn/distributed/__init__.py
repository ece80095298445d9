"""One sequence on several ranks: exact attention to contiguous chunks, with only those keys in transit that some query still sees.

Every rank holds the queries, keys and values of one chunk; chunks follow each other in rank order. Every rank knows the mask of the whole
sequence: it is given, or it is selected by scores, which are the first thing that ranks exchange. So every rank can tell which rows of key
and value each rank needs from each other one (:mod:`.needs`), and the second exchange moves these rows and no others (:mod:`.exchange`). They
are put in front of the rank's own keys, and the ordinary op computes attention to both. Gradients of rows travel back by the reverse
exchange.

Before anything moves, ranks tell each other what they were called with (:mod:`.agreement`), so that a rank that was called with other sizes or
options is an error on every rank, and not a hang. Of masks, values are compared too, in eager calls and where no window stands beside the
mask; values of base and dropout_seed are not, nor is deterministic.
"""

from dmattn.distributed.attention import context_parallel_attention
from dmattn.distributed.traffic import Traffic, record_traffic

__all__ = ["Traffic", "context_parallel_attention", "record_traffic"]
