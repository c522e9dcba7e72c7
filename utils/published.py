"""What others measured, to hold models against: {bytes: seconds}, with the source.

All-reduce over the 8 GPUs of one server, NCCL, 32 KiB to 16 GiB of each GPU's tensor; two sweeps in
S. Bekman's *Machine Learning Engineering* (github.com/stas00/ml-engineering, network/README.md,
"Real network throughput").
"""

SIZES = [2**power for power in range(15, 35)]

# nccl-tests' all_reduce_perf, column "time (us)"
_A100 = (
    43.83, 46.80, 51.76, 61.38, 80.40, 101.9, 101.4, 101.5, 133.5, 276.6,
    424.0, 684.6, 1327.6, 2420.6, 4218.4, 8203.9, 16240, 32136, 64074, 127997,
)  # fmt: skip

# all_reduce_bench.py, column "algbw" in GB/s; with NVLS from 2 MiB on
_H200 = (
    0.82, 1.67, 3.27, 6.71, 13.68, 22.82, 36.87, 61.23, 88.87, 125.65,
    157.62, 198.01, 229.67, 249.23, 257.31, 264.90, 268.10, 270.34, 272.83, 275.58,
)  # fmt: skip

ALL_REDUCE = {
    "8 A100": {size: time * 1e-6 for size, time in zip(SIZES, _A100)},
    "8 H200": {size: size / (speed * 1e9) for size, speed in zip(SIZES, _H200)},
}
