"""Packaging; pyproject.toml says the rest. The package nanomdlm is this folder, without most of the
programs in it: mdlm.py and sample.py are modules of their own."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        programs = ("eval", "export", "serve")
        return [module for module in found if package != "nanomdlm" or module[1] in programs]


setup(cmdclass=dict(build_py=BuildPackage))
