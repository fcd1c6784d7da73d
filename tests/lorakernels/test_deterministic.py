"""Under `torch.use_deterministic_algorithms` no gradient grows by atomic adds, whose order differs from run to run.

In Triton's interpreter: the torch path has no such kernels.
"""

from types import SimpleNamespace

import pytest
import test_mlp_node
import test_projection_node
import torch
from lorakernels.nodes import adapter_grad, output_grad
from lorakernels.nodes.projection import Projection
from lorakernels.ops import glu
from lorakernels.runtime import INTERPRET
from nodes import member

pytestmark = pytest.mark.skipif(not INTERPRET, reason="runs in Triton's interpreter: see test_interpreter.py")
NODES = {
    "attention": test_projection_node.test_the_whole_attention_node,
    "mlp": test_mlp_node.test_the_whole_mlp_node,
}
ATOMIC = [
    (adapter_grad, "a_gradient"),
    (output_grad, "ds_and_db"),
    (output_grad, "b_gradient"),
    (glu, "backward_whole_into"),
    (glu, "backward_a_into"),
]


@pytest.fixture(autouse=True)
def no_atomic_adds(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("this kernel adds up atomically")

    for module, name in ATOMIC:
        monkeypatch.setattr(module, name, refuse)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_whole_node(node, p, monkeypatch):
    """Right, and without the form that is forced."""
    torch.manual_seed(0)
    NODES[node]((17, 17, 17), 3, "one_read", True, p, True, "cpu", torch.float16, monkeypatch)


def test_beside_the_main_stream_of_a_captured_graph():
    projection = Projection([member("q", 64, 32, 16, torch.float16)])
    dy = torch.randn(4, 64).half()
    saved: output_grad.SavedForward = SimpleNamespace(scaled_s=torch.randn(4, 16).half(), accumulator=None)  # pyright: ignore[reportAssignmentType]
    assert output_grad._b_gradients(projection, dy, saved) is None, "the library makes it"
