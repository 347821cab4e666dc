"""What the chip allows: bytes and arithmetic of one task through the fused CNN, counted kernel by kernel.

    python benchmarks/roofline.py [--terabytes 4.3]

mini-ImageNet's shapes, 5-way 1-shot with 15 queries: 80 images of 84x84x3 bytes, five layers of 32 filters in bfloat16.
Every kernel of `fastweights.kernels.cnn` reads its inputs and writes its outputs once; what it reads again is taken to
come from the cache. A product of a and b with n summands counts 2 n.
"""

import argparse

IMAGES, SIDES, FILTERS, CHANNELS = 80, (84, 42, 21, 11, 6, 3), 32, 3
PICTURE = SIDES[0] ** 2 * CHANNELS
PATCH = 32
"""Numbers in a patch of the first layer: 27 bytes and a one, padded to a power of two."""


def activations(layer: int) -> int:
    """Bytes that enter the layers behind the first, and the size of their convolutions' outputs."""
    return 2 * FILTERS * SIDES[layer] ** 2


def inference_bytes() -> dict[str, int]:
    counts = {"first layer": PICTURE + activations(1)}
    return counts | {f"layer {i + 1}": activations(i) + activations(i + 1) for i in range(1, 5)}


def training_bytes() -> dict[str, int]:
    pooled = activations(1)
    winners = pooled // 2  # one byte for two
    counts = {
        "moments": PICTURE,
        "first_forward": PICTURE + pooled + winners,
        "first_backward": PICTURE + 2 * pooled + winners,
    }
    for i in range(1, 5):
        whole, pooled = activations(i), activations(i + 1)
        counts |= {
            f"conv, layer {i + 1}": 2 * whole,
            f"pool, layer {i + 1}": whole + pooled,
            f"pool_sums, layer {i + 1}": whole + pooled,
            f"pool_grad, layer {i + 1}": 2 * whole + pooled,
            f"conv_backward, layer {i + 1}": 4 * whole,  # to the input: dz, dx; to the filters: x, dz
        }
    return counts


def flops() -> tuple[int, int]:
    """Of inference and of training, per image."""
    first = 2 * SIDES[0] ** 2 * 9 * CHANNELS * FILTERS
    further = sum(2 * side**2 * 9 * FILTERS**2 for side in SIDES[1:5])
    moments = 2 * SIDES[0] ** 2 * PATCH**2  # of the patches, and of the patches with the gradient
    return first + further, first + 3 * further + 2 * moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terabytes", type=float, default=4.3, help="a second, from the GPU's memory")
    bandwidth = 1e12 * parser.parse_args().terabytes
    for what, counts, arithmetic in zip(
        ("inference", "training"), (inference_bytes(), training_bytes()), flops(), strict=True
    ):
        for name, count in counts.items():
            print(f"  {name:24} {IMAGES * count / 1e6:8.2f} MB  {1e6 * IMAGES * count / bandwidth:6.2f} µs")
        total = IMAGES * sum(counts.values())
        print(
            f"{what}: {total / 1e6:.1f} MB and {IMAGES * arithmetic / 1e9:.1f} GFLOP a task; by memory at most "
            f"{bandwidth / total:,.0f} tasks/s ({1e6 * total / bandwidth:.1f} µs)\n"
        )


if __name__ == "__main__":
    main()
