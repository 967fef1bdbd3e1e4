"""The data of a fit: who gets which batch, and what Keras would have made of it."""

import functools
import operator
import re

import pytest
from keras_here import data, keras, np, tf

from muster.errors import Refused
from muster.train.batches import Arrays, Epochs, chunks, class_weights, epochs
from muster.train.options import Options, Place, source

pytestmark = pytest.mark.tensorflow


def make(x, y=None, index=0, workers=3, **options):
    return source(x, y, Options(**options), Place(index, workers, 1), keras, tf)


def ids(batch):
    return np.asarray(batch[0]).reshape(len(batch[0]), -1)[:, 0].astype(int).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_arrays_is_every_sample_once(shuffle):
    x = np.arange(101, dtype="float32")[:, None]
    one, other = (make(x, x, batch_size=10, shuffle=shuffle) for _ in range(2))
    orders = []
    for epoch in range(2):
        seen = [ids((one, other)[n % 2].get(n, epoch)) for n in range(one.passes)]
        assert sorted(functools.reduce(operator.iadd, seen, [])) == list(range(101)), "two workers draw the same order"
        assert [len(batch) for batch in seen] == [10] * 10 + [1]
        orders.append(functools.reduce(operator.iadd, seen, []))
    assert (orders[0] != orders[1]) is shuffle
    assert one.varies and one.count(11) == 101 and one.count(13) == 121 and one.count(0) == 0


def test_x_and_y_and_weights_stay_together_in_nests_of_any_type():
    n = 50
    numbers = np.arange(n)
    x = {"a": numbers[:, None].astype("float64"), "b": [numbers.astype("uint8"), numbers.astype(str), numbers > 9]}
    batch = make(x, (numbers, None), sample_weight=numbers / 2, batch_size=7).get(3, 1)
    x, (y, nothing), weights = batch
    assert x["a"].dtype == tf.float32 and x["b"][0].dtype == tf.uint8 and nothing is None
    assert x["a"][:, 0].numpy().tolist() == x["b"][0].numpy().tolist() == y.numpy().tolist()
    assert [int(word) for word in x["b"][1].numpy()] == y.numpy().tolist()
    assert x["b"][2].numpy().tolist() == (y.numpy() > 9).tolist()
    assert np.array_equal(weights.numpy(), y.numpy() / 2)


def test_class_weights_are_those_of_keras():
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    by_class = {0: 0.5, 2: 3.0, 7: 9.0}
    classes = np.random.default_rng(0).integers(-1, 5, 40)
    for y in (classes, classes[:, None], classes.astype("float32"), np.eye(5)[np.maximum(classes, 0)]):
        assert np.array_equal(class_weights(y, None, by_class), class_weight_to_sample_weights(y, by_class))
    with pytest.raises(Refused, match="do not go together"):
        class_weights(classes, np.ones(40), by_class)


@pytest.mark.parametrize(
    "passes, given, sync, expected",
    [
        (80, None, False, Epochs(14, 6, 80, 80, True)),
        (80, None, True, Epochs(15, 6, 80, 27, True, 3)),
        (80, 10, False, Epochs(10, 1, 10, 10, False)),
        (None, 100, True, Epochs(21, 16, 300, 100, False, 3)),
        (2, None, True, Epochs(2, 1, 2, 1, True, 3)),
        (61, None, True, Epochs(13, 5, 61, 21, True, 3)),
        (1, None, False, Epochs(1, 1, 1, 1, True)),
        (100_000, None, False, Epochs(6250, 16, 100_000, 100_000, True)),
    ],
)
def test_how_an_epoch_is_dealt_out(passes, given, sync, expected):
    made = epochs(passes, given, 3, sync)
    assert made == expected
    dealt = [made.numbers(loan) for loan in range(made.loans)]
    assert sorted(number for loan in dealt for number in loan) == list(range(made.batches)) and all(dealt)
    if sync:  # three workers in step, each with the next loan whenever all have done theirs
        rounds = [
            sorted(number for loan in dealt[first : first + 3] for number in loan[k : k + 1])
            for first in range(0, made.loans, 3)
            for k in range(len(dealt[first]))
        ]
        assert rounds == [list(range(n, min(n + 3, made.batches))) for n in range(0, made.batches, 3)]


def test_a_pipeline_begins_elsewhere_on_each_worker_and_begins_again():
    dataset = tf.data.Dataset.range(6).map(lambda n: ([n], n)).batch(1)
    firsts = []
    for index in range(3):
        pipeline = make(dataset, index=index, steps_per_epoch=4)
        assert ids(pipeline.example()) == ids(pipeline.get(0, 0))
        rest = [ids(pipeline.get(0, 0))[0] for _ in range(11)]
        assert len(set(rest)) == 6
        firsts.append(rest[0])
    assert firsts == [1, 3, 5]


def test_a_pydataset_is_dealt_out_by_number():
    class Squares(keras.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return np.array([[index]], "float64"), np.array([index**2])

    made = make(Squares())
    assert sorted(ids(made.get(n, 0))[0] for n in range(made.passes)) == list(range(7))
    assert made.get(0, 0)[0].dtype == tf.float32


def test_validation_split_takes_the_last_samples_as_keras_does():
    x, y = data(101)
    options = Options(validation_split=0.25, sample_weight=np.arange(101.0))
    made = source(x, y, options, Place(0, 1, 1), keras, tf)
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split

    (tx, _, _), (vx, vy, vw) = train_validation_split((x, y, np.arange(101.0)), validation_split=0.25)
    assert made.samples == len(tx)
    for ours, theirs in zip(options.validation_data, (vx, vy, vw), strict=True):
        assert np.array_equal(ours, theirs)


def test_chunks_are_cut_where_they_are_loaded():
    loaded = []

    def load(name):
        loaded.append(name)
        return np.full((5, 1), name, "float32"), np.full(5, name)

    made = make(chunks([3, 4, 5], load), batch_size=2)
    assert [ids(batch) for batch in made.of(1, 0)] == [[4, 4], [4, 4], [4]]
    assert made.passes == 9


def numbers():
    yield from [(np.zeros((2, 1)), np.zeros(2))]


@pytest.mark.parametrize(
    "told, match",
    [
        (lambda: make(tf.data.Dataset.range(8).batch(2)), "steps_per_epoch is needed with .*one pass is 4 batches"),
        (lambda: make(numbers(), batch_size=3, steps_per_epoch=1), "batch_size does not go with generator"),
        (lambda: make(numbers(), 1, steps_per_epoch=1), "y does not go with generator"),
        (lambda: make(np.zeros((3, 1)), np.zeros(4)), r"different lengths.*\(3, 1\), \(4,\)"),
        (lambda: make(np.zeros((0, 1)), np.zeros(0)), "are empty"),
        (lambda: make(7, 7), "cannot train on int"),
        (lambda: make(np.zeros((3, 1)), np.zeros(3), validation_split=1.5), "validation_split=1.5"),
        (lambda: chunks([], id), "There are no chunks"),
        (lambda: make(chunks([1], id), steps_per_epoch=1), "steps_per_epoch does not go with muster.chunks"),
    ],
)
def test_what_makes_no_sense_is_refused(told, match):
    with pytest.raises(Refused) as caught:
        told()
    assert re.search(match, str(caught.value), re.DOTALL)


def test_a_generator_that_has_run_out_is_said_so():
    made = make(numbers(), steps_per_epoch=5)
    made.get(0, 0)
    with pytest.raises(Refused, match="run out"):
        made.get(1, 0)


def test_rows_are_not_written_over_before_they_were_read():
    arrays = Arrays(np.arange(8.0)[:, None], None, None, 4, False, 0, keras, tf)
    first = arrays.get(0, 0)[0].numpy().copy()
    assert np.array_equal(first[:, 0], range(4)) and np.array_equal(arrays.get(1, 0)[0].numpy()[:, 0], range(4, 8))
