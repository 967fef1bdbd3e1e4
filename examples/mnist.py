"""Handwritten digits with a small ConvNet in Keras 3, over Muster's parameter servers: 2 ps and 3 workers.

    muster run examples/mnist.py
    muster run --mode sync examples/mnist.py
    python examples/mnist.py                 # the same script alone, in one process

4,000 of the 5,000 real digits are dealt out to the workers, each once an epoch; the chief measures the accuracy on the
1,000 held-out ones after every epoch (about 0.97 at the end).
"""

import argparse

import keras
import mnist_data

import muster


def convnet():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument(
        "--permute-labels", action="store_true", help="train on shuffled labels: accuracy must be chance"
    )
    options = parser.parse_args()

    train, held_out = mnist_data.load(options.permute_labels)
    images, tests = train.x.reshape(-1, 28, 28, 1), held_out.x.reshape(-1, 28, 28, 1)

    model = convnet()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    slower = keras.callbacks.LearningRateScheduler(lambda epoch: 3e-3 * 0.88**epoch)
    history = muster.fit(
        model, images, train.y, batch_size=50, epochs=options.epochs, validation_data=(tests, held_out.y),
        callbacks=[slower],
    )  # fmt: skip
    if muster.is_chief():
        muster.report(accuracy=history.history["val_accuracy"][-1], loss=history.history["loss"][-1])


if __name__ == "__main__":
    main()
