# SPDX-License-Identifier: Apache-2.0
"""The error of this room."""


class DataError(ValueError):
    """Input that cannot be used: the message names the file and the record, or the setting."""


def missing_extra(what: str, package: str, extra: str) -> DataError:
    """Error for an optional package that is not installed.

    Args:
        what: The thing that needs the package, as the user wrote it.
        package: The import name of the package.
        extra: The extra of seqmix that installs it.
    """
    return DataError(
        f"{what} needs the package {package!r}, which is not installed: "
        f"pip install 'seqmix[{extra}]'"
    )
