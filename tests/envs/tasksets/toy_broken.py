"""A taskset whose own import fails."""

import no_such_package  # noqa: F401
