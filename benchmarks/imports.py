"""Optional packages that consumers load with, imported once before consumers are forked."""

import importlib
import importlib.util

for module in ("teleloader", "torch.utils.data", "torchdata.stateful_dataloader"):
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        importlib.import_module(module)
