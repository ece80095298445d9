"""Programs that torch.compile and torch.export make: one for all shapes, with the results of the code they were made of."""

from __future__ import annotations

import torch


def assert_compiles_once(fn, arguments, step=lambda call, *given: call(*given), backend="aot_eager"):
    """``step(call, *given)`` has the same results with ``fn`` and with ``fn`` compiled, which the first of these arguments compile alone."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)
    for number, given in enumerate(arguments):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            ours = step(compiled, *given)
        torch.testing.assert_close(ours, step(fn, *given))


def exported(module, example, path, **options):
    """The module as a program that was exported with an example, saved and loaded."""
    torch.export.save(torch.export.export(module, example, **options), path)
    return torch.export.load(path).module()


def assert_exports(module, example, arguments, path, **options):
    """The program has the results of the module, bit for bit."""
    loaded = exported(module, example, path, **options)
    for given in arguments:
        assert torch.equal(loaded(*given), module(*given))
