"""Whether rows keep their bits behind a long text, too.

The probe of a graph (`graph_contract.py`) looks at some twenty tokens, since it runs at every
opening. A kernel that splits attention by the length of the cache would pass it: another
provider's, or one of a later onnxruntime. So rows are compared behind a long text as well, whenever
the device is measured, which it is anew for each of those (`plan.py`).
"""

from __future__ import annotations

import numpy as np

from .onnx_model import VERIFY_ROWS, OnnxModel


def rows_keep_bits(model: OnnxModel, context: int) -> bool:
    """Whether rows of a wide pass behind `context` tokens are those of a lone token in their
    place; the cache is emptied. The context has room for them.
    """
    tokens = [(7 * i + 1) % model.vocab_size for i in range(context + VERIFY_ROWS)]
    model.rollback(0)
    model.extend(tokens[:context])
    rows = model.max_rows
    wide = model.forward(tokens[context : context + rows]).copy()
    alike = True
    for row in (rows - 1, rows // 2, 0):  # each leaves the cache before it as it was
        model.rollback(context + row)
        alone = model.forward([tokens[context + row]])
        alike = alike and np.array_equal(alone[0], wide[row])
    model.rollback(0)
    return alike
