"""Parameter servers: tables of rows that many workers train, a place where a parameter of a Plan can live."""
