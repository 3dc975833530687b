"""The pool in virtual time: the decision functions of production against simulated slots with measured stage times."""
