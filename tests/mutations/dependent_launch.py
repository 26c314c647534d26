"""Defects of kernels that begin before the one before them has ended."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FOLDER = "kernels/dflash_kernels"
COMPILED = ("tests/kernels/test_dependent_launch.py",)
READ = "    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)\n"
ROW = "    row = tl.program_id(0).to(tl.int64)\n"

DEPENDENT_LAUNCH_MUTANTS = (
    *mutants_of(
        f"{FOLDER}/dependent_launch.py",
        COMPILED,
        (
            "the next kernel begins before this one has waited",
            ("        gdc_wait()\n        gdc_launch_dependents()\n"),
            ("        gdc_launch_dependents()\n        gdc_wait()\n"),
        ),
        ("a kernel that begins early does not wait", "        gdc_wait()\n", ""),
        ("launches are dependent ones whatever the setting", "if _Wanted.value and _has", "if _has"),
    ),
    *mutants_of(
        f"{FOLDER}/dependent_launch.py",
        (f"{COMPILED[0]}::test_gpus_before_hopper_and_drivers_before_cuda_12_3_have_it_not",),
        ("GPUs before Hopper launch so", "target.arch >= FIRST_ARCH and ", ""),
        ("a driver that cannot capture it is asked to", " and driver_version() >= FIRST_DRIVER", ""),
    ),
    *mutants_of(
        f"{FOLDER}/rms_norm.py",
        COMPILED,
        (
            "a norm reads its input before the kernel that writes it has ended",
            "    after_kernel_before(PDL)\n" + READ,
            READ + "    after_kernel_before(PDL)\n",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/activation.py",
        COMPILED,
        (
            "some programs of a gate end without waiting",
            "    after_kernel_before(PDL)\n" + ROW,
            ROW + "    if row < 1000:\n        after_kernel_before(PDL)\n",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/triton_import.py",
        ("tests/kernels/test_without_triton.py",),
        ("without Triton a decorator drops the kernel", "return arguments[0] if arguments else self", "return self"),
        ("Triton counts as there where it is not", "not isinstance(triton, _Absent)", "True"),
    ),
)
