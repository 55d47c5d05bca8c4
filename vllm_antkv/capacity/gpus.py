"""The GPUs that a cache can be planned for, by name: the one table of their sizes.

From NVIDIA's data sheets of the A10, L4, L40S, A100 (SXM), H100 (SXM), H200 (SXM) and B200 (HGX), and the white
papers of the Ada and RTX Blackwell architectures for the RTX 4090, RTX 5090 and RTX PRO 6000. Shared memory is that
of their compute capability in the CUDA programming guide. Memory is as sold; cards report a few percent more. Data
sheets print 16-bit peaks with sparsity for most of these GPUs: `dense_flops` is what is left without, in products of
bfloat16 that are added in float32. What large products sustain stands in no data sheet: `flops` assumes 70 to 77% of
the peak. The clock of H100 and H200 is the one that the peak is stated for; an H200 had 1.98 GHz while it decoded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    device: as CUDA calls it.
    memory in bytes, bandwidth in bytes/s, clock in Hz.
    dense_flops: 16-bit operations/s at most.
    flops: 16-bit operations/s that large products sustain.
    capability: compute capability. shared_bytes: the most shared memory of a CTA.
    """

    device: str
    memory: float
    bandwidth: float
    dense_flops: float
    flops: float
    multiprocessors: int
    clock: float
    capability: tuple[int, int]
    shared_bytes: int


GPUS = {
    "a10-24": Gpu("NVIDIA A10", 24e9, 0.6e12, 125e12, 87e12, 72, 1.695e9, (8, 6), 99 << 10),
    "l4-24": Gpu("NVIDIA L4", 24e9, 0.3e12, 121e12, 85e12, 58, 2.04e9, (8, 9), 99 << 10),
    "rtx4090-24": Gpu("NVIDIA GeForce RTX 4090", 24e9, 1.008e12, 165.2e12, 116e12, 128, 2.52e9, (8, 9), 99 << 10),
    "l40s-48": Gpu("NVIDIA L40S", 48e9, 0.864e12, 362e12, 253e12, 142, 2.52e9, (8, 9), 99 << 10),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 40e9, 1.555e12, 312e12, 240e12, 108, 1.41e9, (8, 0), 163 << 10),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 80e9, 2.039e12, 312e12, 240e12, 108, 1.41e9, (8, 0), 163 << 10),
    "h100-80": Gpu("NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 989.4e12, 700e12, 132, 1.83e9, (9, 0), 227 << 10),
    "h200-141": Gpu("NVIDIA H200", 141e9, 4.8e12, 989.4e12, 700e12, 132, 1.83e9, (9, 0), 227 << 10),
    "b200-180": Gpu("NVIDIA B200", 180e9, 8e12, 2250e12, 1600e12, 148, 1.855e9, (10, 0), 227 << 10),
    "rtx5090-32": Gpu("NVIDIA GeForce RTX 5090", 32e9, 1.792e12, 209.5e12, 147e12, 170, 2.407e9, (12, 0), 99 << 10),
    "rtxpro6000-96": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        *(96e9, 1.792e12, 503.8e12, 353e12, 188, 2.617e9),
        *((12, 0), 99 << 10),
    ),
}
