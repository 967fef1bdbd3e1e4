import pytest

from muster.errors import MusterError
from muster.train import gone
from muster.train.gone import Gone, instead, refusal


def refused(walk):
    with pytest.raises(MusterError) as caught:
        walk()
    return caught.value


@pytest.mark.parametrize(
    "walk, name, replacement",
    [
        (
            lambda c: c.layers.xavier_initializer(),
            "tf.contrib.layers.xavier_initializer",
            "tf.glorot_uniform_initializer",
        ),
        (lambda c: c.rnn.BasicLSTMCell(4), "tf.contrib.rnn.BasicLSTMCell", "tf.nn.rnn_cell.BasicLSTMCell"),
        (lambda c: c.slim, "tf.contrib.slim", "tf-slim"),
        (lambda c: c.layers.never_heard_of, "tf.contrib.layers.never_heard_of", "tf.layers"),
        (lambda c: c.never_heard_of, "tf.contrib.never_heard_of", "removed"),
    ],
)
def test_what_is_gone_is_refused_by_name_with_what_replaces_it(walk, name, replacement):
    error = refused(lambda: walk(Gone("contrib")))
    assert name in error.what and replacement in error.try_ and __file__ in error.at


def test_a_part_with_parts_of_its_own_can_be_named_before_it_is_used():
    layers = Gone("contrib").layers
    assert "tf.contrib.layers" in refused(lambda: layers()).what


def test_python_may_look_at_it():
    assert not hasattr(Gone("contrib"), "__wrapped__")
    repr(Gone("contrib"))


@pytest.mark.parametrize("path", sorted(gone.INSTEAD))
def test_every_row_has_an_answer_and_a_part_above_it(path):
    assert instead(path)
    above = path.rpartition(".")[0]
    assert not above or instead(above)


def test_an_import_is_refused_by_what_its_line_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from tensorflow.contrib import rnn\n")
    code = compile("raise error('tensorflow.contrib')", str(script), "exec")
    assert "tf.contrib.rnn " in refused(lambda: exec(code, {"error": gone.imported})).what


def test_the_error_has_four_rows():
    text = str(refusal("estimator.Estimator"))
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["at", "because", "try"]
