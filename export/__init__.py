"""Turn models into folders that the EdgeDraft runtime opens; import the module you need."""
