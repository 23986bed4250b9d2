"""What consumers load with, as far as it is installed: imported once for all of them."""

import importlib
import importlib.util

for module in ("teleloader", "torch.utils.data", "torchdata.stateful_dataloader"):
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        importlib.import_module(module)
