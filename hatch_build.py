"""Puts registry/ and manifests/ inside kernel_loader/ in a wheel. An editable install finds them in the checkout."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataHook(BuildHookInterface):
    """Asked by hatchling for each wheel that it builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the data, unless the wheel is an editable one: there it would hide the package itself."""
        if version == "standard":
            build_data["force_include"] |= {name: f"kernel_loader/{name}" for name in ("registry", "manifests")}
