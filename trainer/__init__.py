"""Train drafters and adapters for EdgeDraft; import the module you need."""
