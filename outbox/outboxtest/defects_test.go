package outboxtest_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// defects are deliberate mistakes of the store in memory, and the subtests
// that must notice each.
var defects = map[string][]string{
	// Staging.
	"check fails":                           {"CheckFindsNothingWrong"},
	"times are local":                       {"CommittedStageIsPending"},
	"staged outside the transaction":        {"RolledBackStageLeavesNothing", "RolledBackSavepointTakesItsStagesBack", "OnlyTheStagerSeesItsStageBeforeCommit", "RolledBackRestageLeavesTheSettlementIntact", "RestageWhileLeasedIsRolledBackWhole"},
	"own stage is not seen":                 {"OnlyTheStagerSeesItsStageBeforeCommit"},
	"nil transaction is another error":      {"NilTransactionIsRefused"},
	"finished transaction is another error": {"FinishedTransactionIsRefused"},
	"cancelled context is ignored":          {"CancelledStageLeavesTheTransactionUsable"},
	"versions restart after a delete":       {"VersionsOfAKeyIncrease"},
	"versions are counted by key":           {"VersionsAreUniqueAndSurviveJavaScript", "VersionsOfAKeyIncrease"},
	"versions are the clock":                {"ClockSetBackKeepsVersionsIncreasing"},
	"versions in another order":             {"VersionsComeInTheOrderOfRows", "AnyNumberOfRowsIsStagedAtOnce"},
	"version drawn before the lock":         {"OneHotKeyNeverRegresses", "RacingStagersConverge"},
	"channels share keys":                   {"ChannelsAreIndependent"},
	"channels share claims":                 {"ChannelsAreIndependent"},
	"empty payload is nil":                  {"PayloadsComeBackAsStaged", "TombstonesAreClaimedLikeValues"},
	"payload is text":                       {"PayloadsComeBackAsStaged"},
	"empty header is not nil":               {"HeadersComeBackAsStaged"},
	"tombstone is a value":                  {"TombstonesAreClaimedLikeValues"},
	"keys are folded":                       {"KeysAreComparedByteByByte"},
	"long keys are cut":                     {"LongestKeysAndChannelsFit"},
	"stagers do not wait":                   {"SecondStagerWaitsForTheFirst"},

	// Claiming.
	"claim leaves out the header":            {"ClaimReturnsTheWholeRow"},
	"due time is ignored":                    {"EmptyChannelGivesNothing", "RetryKeepsTheRowForItsDelay", "BatchDelayRoundsUp"},
	"claimed by key":                         {"ClaimsComeInTheOrderOfDueTimes", "RetriesComeInTheOrderOfDueTimes"},
	"failing rows first":                     {"RetriesComeInTheOrderOfDueTimes"},
	"limit is ignored":                       {"ClaimTakesNoMoreThanItsLimit"},
	"leases are ignored":                     {"LeasedRowIsNotClaimedAgain", "RestageWaitsForTheLease"},
	"leases never lapse":                     {"LapsedLeaseIsClaimedAgain", "RestageWaitsForTheLeaseToLapse"},
	"leases lapse early":                     {"LeaseHoldsUntilItsEnd"},
	"attempts are not counted at claim":      {"LapsedLeaseIsClaimedAgain", "ClaimReturnsTheWholeRow"},
	"token stays":                            {"LapsedLeaseIsClaimedAgain", "TokensOfAKeyIncrease"},
	"tokens restart after a discard":         {"TokensOfAKeyIncrease", "DiscardTakesTheLeaseAway"},
	"fresh rows wait for a full pass":        {"FreshRowIsClaimedWithoutAFullPass"},
	"full pass is not full":                  {"LateCommitIsFoundByAFullPass"},
	"claims race":                            {"ClaimsAtOnceShareNoRow"},
	"claim overrides locks":                  {"LockedRowIsNotClaimed"},
	"cancelled context is ignored by relays": {"CancelledClaimTakesNothing"},

	// Settling and extending.
	"done keeps the row":                  {"DoneDeletesTheRow"},
	"delay is ignored":                    {"RetryKeepsTheRowForItsDelay", "ReleaseGivesTheAttemptBack"},
	"delay is doubled":                    {"TimesAreTheClocks"},
	"delay in seconds":                    {"RetryComesBackAfterItsDelay", "RetryIsDueExactlyAfterItsDelay"},
	"delay overflows":                     {"LongestDelayDoesNotOverflow"},
	"error is dropped":                    {"RetryKeepsTheRowForItsDelay", "RetryComesBackAfterItsDelay"},
	"claim clears the error":              {"RetryComesBackAfterItsDelay", "LongestErrorIsKept"},
	"long errors are cut":                 {"LongestErrorIsKept"},
	"release spends the attempt":          {"ReleaseGivesTheAttemptBack"},
	"results are sorted":                  {"EachSettlementHasItsResult"},
	"batch stops at a stale row":          {"EachSettlementHasItsResult"},
	"same settlement again is stale":      {"SameSettlementAgainIsDone"},
	"settled twice":                       {"SameSettlementAgainIsDone", "OtherSettlementAfterwardsIsStale"},
	"other settlement afterwards is done": {"OtherSettlementAfterwardsIsStale"},
	"again is ignored":                    {"GoneRowIsStaleUnlessSettledAgain"},
	"again is the batch's":                {"GoneRowIsStaleUnlessSettledAgain"},
	"gone row is done":                    {"GoneRowIsStaleUnlessSettledAgain"},
	"lapsed lease is stale":               {"LapsedLeaseNobodyTookIsSettled"},
	"token is not compared":               {"StaleTokenChangesNothing", "LapsedLeaseIsClaimedAgain"},
	"version is not compared":             {"RestageWaitsForTheLease", "RacingStagersConverge", "EachSettlementHasItsResult"},
	"extend does nothing":                 {"ExtendHoldsTheLease"},
	"extend ignores the token":            {"EachExtensionHasItsResult", "LapsedLeaseIsClaimedAgain"},
	"lapsed lease is not extended":        {"LapsedLeaseNobodyTookIsExtended"},
	"restaged row is not extended":        {"RestagedRowIsExtended"},
	"settled lease is extended":           {"SettledLeaseIsNotExtended"},
	"settle overrides locks":              {"LockedRowIsBusyToSettle"},
	"settle waits for locks":              {"LockedRowIsBusyToSettle"},
	"settle does not wait for the writer": {"SettlementWaitsForTheWriter"},
	"extend overrides locks":              {"LockedRowIsBusyToExtend"},
	"discard overrides locks":             {"LockedRowIsBusyToDiscard"},

	// Restaging.
	"restage keeps the header":           {"RestageReplacesTheWholeValue"},
	"restage postpones":                  {"RestageKeepsTheEarlierDueTime", "RestageInAWindowKeepsItsBoundary", "RestageWhileLeasedWaitsForItsBoundary"},
	"staged at first":                    {"RestageInAWindowKeepsItsBoundary"},
	"restage never gets sooner":          {"RestageMakesAScheduledRowDueSooner"},
	"restage keeps attempts":             {"RestageInBackoffStartsAnew", "RestageWaitsForTheLease"},
	"tried row keeps its due time":       {"RestageOfATriedRowObeysBatchDelay", "RestageInBackoffStartsAnew"},
	"restage ends the lease":             {"RestageWaitsForTheLease"},
	"restage ends the token":             {"RestageWaitsForTheLease", "RestagedRowIsExtended"},
	"superseded keeps the lease":         {"RestageWaitsForTheLease"},
	"superseded row waits for the delay": {"RestageWaitsForTheLease"},
	"superseded again is stale":          {"SupersededAgainIsNotStale"},
	"no rounding":                        {"BatchDelayRoundsUp"},
	"boundary is rounded up":             {"StageOnABoundaryIsDueAtOnce"},

	// Reading and discarding.
	"list has payloads":                         {"ListShowsRowsInEveryState"},
	"page repeats its first key":                {"ListPagesThroughKeys"},
	"discard ignores the version":               {"DiscardDeletesThatVersionOnly"},
	"discard spares leased rows":                {"DiscardTakesTheLeaseAway"},
	"look overlooks leases":                     {"LookTellsWhenToClaim"},
	"look takes the latest":                     {"LookTakesTheSoonest"},
	"looks are sorted":                          {"LookAnswersInTheOrderOfChannels"},
	"leased rows count as due":                  {"StatsCountRowsByState"},
	"stats leave out channels without due rows": {"StatsShowEveryChannel"},
	"look waits for locks":                      {"ReadersWaitForNobody"},
	"no hints":                                  {"HintsFollowStages"},
	"hint of another version":                   {"HintsFollowStages"},
	"stop does not stop hints":                  {"StoppedHintsAreSilent"},

	// Outages.
	"channels share an outage":       {"OutagePausesTheChannelAlone"},
	"outage is ignored":              {"OutagePausesTheChannelAlone", "OutageIsProbedWithOneRow"},
	"first pause is long":            {"OutagePausesTheChannelAlone"},
	"outage never ends":              {"OutagePausesTheChannelAlone", "OutageIsProbedWithOneRow"},
	"many probes":                    {"OutageIsProbedWithOneRow", "LostProbeIsGivenOutAgain"},
	"probe takes the batch":          {"OutageIsProbedWithOneRow"},
	"reports lengthen the pause":     {"ReportsInAPauseDoNotLengthenIt"},
	"pauses do not grow":             {"PausesGrowWithFailedProbes"},
	"pauses grow for ever":           {"PausesGrowWithFailedProbes"},
	"outage level stays":             {"PausesGrowWithFailedProbes"},
	"empty claim takes the probe":    {"EmptyClaimTakesNoProbe"},
	"probe is never given out again": {"LostProbeIsGivenOutAgain"},
}

// A suite that cannot fail proves nothing: each defect, in a process of its
// own, must fail the subtests that hold its opposite.
func TestSuiteNoticesDefects(t *testing.T) {
	clock := &outboxtest.Clock{}
	notice(t, defects, "TestMemoryHoldsTheContractOnAClock", "TestMemoryWithOneWriterHoldsTheContract", outboxtest.LatestSuite{Clock: clock}.Names())
}

// notice runs the suites that hold named subtests, the second where the first
// has them not, with each defect.
func notice(t *testing.T, defects map[string][]string, suite, oneWriter string, inSuite []string) {
	for defect, names := range defects {
		t.Run(defect, func(t *testing.T) {
			t.Parallel()
			suite := suite
			if !slices.Contains(inSuite, names[0]) {
				suite = oneWriter
			}
			count := "1"
			if strings.HasPrefix(defect, "version") { // some take the right moment
				count = "10"
			}
			run := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.count="+count, "-test.run", "^"+suite+"$/^("+strings.Join(names, "|")+")$")
			run.Env = append(os.Environ(), defectVariable+"="+defect)
			out, err := run.CombinedOutput()
			if err == nil {
				t.Errorf("the suite passed")
			}
			for _, name := range names {
				if !strings.Contains(string(out), "--- FAIL: "+suite+"/"+name+" ") {
					t.Errorf("%s did not fail:\n%s", name, out)
				}
			}
		})
	}
}

func TestEverySubtestHasADefect(t *testing.T) {
	clock := &outboxtest.Clock{}
	everyHasADefect(t, defects, append(outboxtest.LatestSuite{Clock: clock}.Names(), outboxtest.LatestSuite{Clock: clock, OneWriter: true}.Names()...))
}

func everyHasADefect(t *testing.T, defects map[string][]string, all []string) {
	noticed := []string{}
	for _, names := range defects {
		noticed = append(noticed, names...)
	}
	for _, name := range all {
		if !slices.Contains(noticed, name) {
			t.Errorf("no defect makes %s fail", name)
		}
	}
	for _, name := range noticed {
		if !slices.Contains(all, name) {
			t.Errorf("there is no subtest %s", name)
		}
	}
}
