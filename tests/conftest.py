"""For every test."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Jobs that a shell starts in the background are told to ignore Ctrl-C, and would pass that on to what tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit of time: a busy machine is no mistake of the code. `make soak`
# looks at other ones.
_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("searching", _UNHURRIED)
settings.register_profile("same", _UNHURRIED, derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random draws do not depend on the tests that came before, which differ from run to run where workers share."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one method share a worker, and with it the training that several of them look at."""
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if item.path.parent.name == "methods" and isinstance(name, str):
            item.add_marker(pytest.mark.xdist_group(name))
