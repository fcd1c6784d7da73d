"""Finds the packages. All else is in pyproject.toml, which can search for packages or name them, not both."""

from setuptools import find_namespace_packages, setup

setup(packages=[*find_namespace_packages(include=["lorabench", "lorabench.*"]), "lorabench_ablations"])
