"""Pure values and rules: samples, staleness, the ledger, records, policies, queries; helpers for asyncio."""
