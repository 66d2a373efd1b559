"""Questions to attacks, one file each, loaded by name through the registry (`ppbench.questions`)."""
