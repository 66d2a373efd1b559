"""Questions: what an attack is asked, one file each, found by name through the registry (`ppbench.questions`)."""
