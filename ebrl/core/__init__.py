"""What every stage shares: protocols, records, lanes, pools, the ledger, virtual time."""
