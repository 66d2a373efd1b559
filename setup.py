"""Map the folders `attacks/` and `defenses/` into the package, found afresh so that no subpackage is forgotten."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["ppbench*"])
    + [f"ppbench.{name}" for name in find_packages(include=["attacks*", "defenses*"])],
    package_dir={"ppbench": "ppbench", "ppbench.attacks": "attacks", "ppbench.defenses": "defenses"},
)
