"""Benchmarks that anyone can rerun: ``python -m dmattn_bench``. Nothing here is imported by dmattn itself.

How it is made, from the bottom up:

- ``cases`` says what one workload computes, ``peers`` what dmattn is compared with, ``measure`` checks results, by the tolerances of
  ``two_ways``, and takes times and memory.
- ``suite`` measures cases and makes one row of each; ``decode``, ``serve``, ``training_step`` and ``context_parallel`` measure what is not
  one call of attention, and can be run by themselves.
- ``workloads`` gives all of them names; ``records`` notes the machine, and writes and reads results.
- ``compare`` finds what became slower; ``report``, ``plots``, ``page_tables``, ``front_page`` and the modules named ``*_report`` turn results
  into pages and pictures, with ``rows``, ``tables``, ``forms`` and ``style``; ``cited`` finds the source of numbers in sentences.

Scripts of the folder ``benchmarks/`` use the same parts for questions of their own; a workload of theirs becomes one of all by a line in
``workloads``.
"""

import importlib.util

if importlib.util.find_spec("hypothesis") is None:
    raise ImportError(
        "dmattn_bench needs hypothesis, on which dmattn.testing with its tolerance rule rests: pip install hypothesis"
    )
