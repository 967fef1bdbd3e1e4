"""MultiWorkerMirroredStrategy with a loop of one's own: every worker holds the model, gradients go round a ring.

    muster run --engine tensorflow --kind mwms --ps 0 --workers 2 examples/mwms_custom_loop.py

No ps. Softmax regression on handwritten digits; a step takes a batch of 100 from every worker.
"""

import argparse

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else that uses TensorFlow

import mnist_data  # noqa: E402

import muster  # noqa: E402


def digits(context):
    """This worker's share of the digits. All must take the same number of steps, so it is repeated."""
    training, _ = mnist_data.load()
    share = training.share(context.input_pipeline_id, context.num_input_pipelines)
    return tf.data.Dataset.from_tensor_slices((share.x, share.y)).shuffle(4000, seed=1).repeat().batch(100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    with strategy.scope():
        weights = tf.Variable(tf.zeros([784, 10]))
        bias = tf.Variable(tf.zeros([10]))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.matmul(x, weights) + bias))
        gradients = tape.gradient(loss, [weights, bias])
        replica = tf.distribute.get_replica_context()
        for variable, gradient in zip((weights, bias), replica.all_reduce("mean", gradients), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    @tf.function
    def train_step(x, y):
        return strategy.reduce("mean", strategy.run(step, args=(x, y)), axis=None)

    data = iter(strategy.distribute_datasets_from_function(digits))
    muster.report(total=options.steps)
    for done in range(1, options.steps + 1):
        loss = train_step(*next(data))
        muster.report(step=done, loss=float(loss))
    if muster.is_chief():
        _, held_out = mnist_data.load()
        guesses = tf.argmax(tf.matmul(held_out.x, weights) + bias, 1)
        accuracy = float(tf.reduce_mean(tf.cast(guesses == held_out.y, tf.float32)))
        print(f"accuracy {accuracy:.4f} after {options.steps} steps")
        muster.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
