"""The errors a caller may want to catch.

    EdgeDraftError
    ├── AdapterError    an adapter that does not fit, or is not there
    ├── DrafterError    drafters that cannot be used, alone or together
    ├── FolderError     a model folder that cannot be used as it is
    ├── PromptError     a prompt that cannot be served
    ├── ProviderError   an execution provider that this onnxruntime does not have
    ├── StateError      device state that cannot be read or written
    └── VocabularyError a tokenizer whose tokens cannot be described in bytes

A wrong argument raises `ValueError`. The command line says in one line what is wrong with its
options, and every `EdgeDraftError`, and exits with 2; any other `ValueError` there is a bug.
"""


class EdgeDraftError(Exception):
    """Base of every error that EdgeDraft raises on purpose."""


class AdapterError(EdgeDraftError):
    """An adapter that cannot be used: damaged, made for something else, or not there."""


class FolderError(EdgeDraftError):
    """A model folder that cannot be used: missing, damaged or of an unknown kind."""


class PromptError(EdgeDraftError):
    """A prompt that cannot be served: empty, not Unicode, or longer than the context."""


class ProviderError(EdgeDraftError):
    """An execution provider that this build of onnxruntime does not have."""


class StateError(EdgeDraftError):
    """Device state that cannot be read or written."""


class DrafterError(EdgeDraftError):
    """Drafters that cannot be used, alone or together."""


class VocabularyError(EdgeDraftError):
    """A tokenizer whose tokens cannot be described in bytes."""
