from __future__ import annotations

import numpy as np
import pytest

from muster.errors import MusterError
from muster.ps.slabs import STEP, Declaration, Parameter, aligned, declaration, differences, lay_out


def model(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(f"v{i}", shape) for i, shape in enumerate(shapes)]


SOFTMAX = model((784, 10), (10,))
DEEP = model(*[(784, 128), (128,)], *[shape for _ in range(19) for shape in ((128, 128), (128,))], (128, 10), (10,))
W3 = model((784, 512), (512,), (512, 768), (768,), (768, 256), (256,), (256, 10), (10,))
LOPSIDED = model((10, 10), (100_000, 50), (7,), ())


@pytest.mark.parametrize("parameters", [SOFTMAX, DEEP, W3, LOPSIDED], ids=["softmax", "deep", "mlp", "lopsided"])
@pytest.mark.parametrize("ps", [1, 2, 3, 5, 8])
def test_slabs_are_balanced_contiguous_and_aligned(parameters: list[Parameter], ps: int) -> None:
    layout = lay_out(parameters, ps)
    even = layout.size / ps
    assert layout.cuts[0].start == 0 and layout.cuts[-1].stop == layout.size
    for one, other in zip(layout.cuts, layout.cuts[1:], strict=False):
        assert one.stop == other.start
    for cut in layout.cuts:
        assert cut.start % STEP == 0
        assert abs(cut.size - even) <= max(0.05 * even, 2 * STEP)
    assert all(start % STEP == 0 for start in layout.starts)


@pytest.mark.parametrize("ps", [1, 2, 3, 7, 40])
def test_every_float_of_every_parameter_is_in_one_slab(ps: int) -> None:
    layout = lay_out(LOPSIDED, ps)
    seen = np.zeros(layout.size, int)
    for cut in layout.cuts:
        for piece in cut.pieces:
            begins = layout.starts[piece.parameter] + piece.first
            assert begins == cut.start + piece.start
            seen[cut.start + piece.start : cut.start + piece.stop] += 1
    for view in layout.views(seen):  # type: ignore[arg-type]
        assert (view == 1).all()
    assert seen.sum() == sum(p.size for p in LOPSIDED)


def test_a_large_tensor_is_cut_between_rows() -> None:
    layout = lay_out(SOFTMAX, 2)
    assert layout.cuts[1].pieces[0].first % 10 == 0
    assert layout.is_cut()


def test_a_cut_prefers_the_place_between_two_tensors() -> None:
    assert not lay_out(model((100, 16), (101, 16)), 2).is_cut()


def test_a_model_smaller_than_its_ps() -> None:
    layout = lay_out(model((3,), ()), 5)
    assert sum(cut.size for cut in layout.cuts) == layout.size
    assert sum(len(cut.pieces) for cut in layout.cuts) == 2


def test_views_are_aligned_and_share_memory() -> None:
    layout = lay_out(DEEP, 3)
    vector = aligned(layout.size)
    assert vector.ctypes.data % 64 == 0
    for view, parameter in zip(layout.views(vector), DEEP, strict=True):
        assert view.ctypes.data % 64 == 0 and view.shape == parameter.shape and np.shares_memory(view, vector)


@pytest.mark.parametrize(
    "parameters", [[], model((0, 3)), [Parameter("a", (2,)), Parameter("a", (3,))], model((-2, -3))]
)
def test_models_that_cannot_be(parameters: list[Parameter]) -> None:
    with pytest.raises(MusterError):
        lay_out(parameters, 2)


def test_a_declaration_survives_the_wire() -> None:
    rows = (Parameter("a", (2, 3)), Parameter("s", (3,), False, False, "float16"))
    ours = Declaration(rows, {"class_name": "SGD"}, 2)
    assert declaration(ours.told()) == ours
    assert declaration(ours.told()).fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("told", [{}, {"parameters": 3}, {"parameters": [["a"]], "optimizer": {}, "ps": 1}])
def test_what_is_not_a_declaration(told: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a declaration"):
        declaration(told)


def test_the_learning_rate_is_not_part_of_what_must_agree() -> None:
    one, other = (
        Declaration(tuple(SOFTMAX), {"class_name": "SGD", "config": {"learning_rate": rate}}, 2) for rate in (0.1, 0.2)
    )
    assert one.fingerprint() == other.fingerprint()


def test_differences_name_the_parameter() -> None:
    ours = Declaration(tuple(model((2, 3), (4,))), {}, 1)
    theirs = Declaration(tuple(model((2, 5), (4,), (6,))), {}, 1)
    told = differences(ours, theirs)
    assert "v0 is float32[2, 3] here and float32[2, 5] at the chief" in told
    assert "v2 is declared by the chief and not here" in told
