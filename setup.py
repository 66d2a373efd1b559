"""Map `attacks/`, `defenses/`, `leaderboards/suites/` into the package; found, so that no subpackage is forgotten."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["ppbench*"])
    + [f"ppbench.{name}" for name in find_packages(include=["attacks*", "defenses*"])]
    + ["ppbench.shipped_suites"],
    package_dir={
        "ppbench": "ppbench",
        "ppbench.attacks": "attacks",
        "ppbench.defenses": "defenses",
        "ppbench.shipped_suites": "leaderboards/suites",
    },
)
