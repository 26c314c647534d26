"""Defects of what is fetched from the hub, and of what is said of it."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

OF_HUB = "tests/checkpoints/test_hub.py"
OF_TABLE = ("tests/drafters/test_published.py",)

HUB_MUTANTS = (
    *mutants_of(
        "dflash_backend/checkpoints/hub.py",
        (f"{OF_HUB}::test_files_that_are_not_read_are_not_fetched",),
        ("weights that are not read are fetched", "ignore_patterns=list(UNREAD_PATTERNS)", "ignore_patterns=[]"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/files.py",
        (f"{OF_HUB}::test_files_that_are_not_read_are_not_fetched",),
        ("chat templates in their folder are not fetched", "if pattern != TEMPLATES),", "),"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/files.py",
        (f"{OF_HUB}::test_a_repository_with_pickled_weights_alone_is_refused_as_such",),
        ("pickled weights that stay at the hub are not seen", " + _names_at_the_hub(directory)", ""),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/hub.py",
        (f"{OF_HUB}::test_offline_a_cache_that_lacks_files_is_taken_as_it_is",),
        (
            "a cache without files that are not needed is refused",
            "if HF_HUB_OFFLINE and found is not",
            "if False and found is not",
        ),
        ("an interrupted download is served", "if HF_HUB_OFFLINE and found is not", "if found is not"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/hub.py",
        (
            f"{OF_HUB}::test_a_download_that_breaks_off_is_tried_again",
            f"{OF_HUB}::test_one_that_breaks_off_each_time_is_an_error_that_says_what_to_do",
            f"{OF_HUB}::test_what_another_attempt_does_not_change_is_not_tried_again",
        ),
        ("errors of the HTTP library are a traceback", "RuntimeError, *bases)", "RuntimeError)"),
        ("a full disk is tried again", "if pause is None or not _broke_off(error):", "if pause is None:"),
    ),
    *mutants_of(
        "dflash_backend/drafters/published.py",
        OF_TABLE,
        ("a drafter with pickled weights is said to load", "if self.pickled:", "if False:"),
    ),
)
