"""Compiles the kernels into a wheel, for every instruction set of this kind of machine; the rest is pyproject.toml."""

import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
# Packages whose __init__ would import torch, which is not there when a wheel is built.
for name in ("lockstep.ops", "lockstep.ops.native"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT / name.replace(".", "/"))]
    sys.modules[name] = package

from lockstep.ops.native.compiling import CompilerMissing, compile_all  # noqa: E402


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # a source checkout compiles what its processor needs at first use
        try:
            compile_all(Path(self.build_lib) / "lockstep" / "ops" / "native" / "built")
        except CompilerMissing as reason:
            print(f"warning: the wheel lacks compiled kernels, which are compiled at first use instead: {reason}")


class WheelForAnyPython(bdist_wheel):
    """The kernels are called through ctypes: they belong to the kind of machine, not to the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class DistributionWithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython},
    distclass=DistributionWithKernels,
)
