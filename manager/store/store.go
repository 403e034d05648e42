// Package store keeps the manager's state in etcd: what operators asked for,
// and what must survive a restart so that no flow moves (lookup tables, the
// flow seed, the generation, drains, last known health).
//
// One member of etcd runs embedded in the process, without a listener. Whoever
// holds the store is the elected leader: each write is guarded by its election
// key, and one of tables by the generation it was computed from.
package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// SchemaVersion is the layout of keys and values below. A directory of a later
// one is refused.
const SchemaVersion = 1

// Keys. A VIP's or a pool's last element is its name.
const (
	root          = "/quartet/"
	keySchema     = root + "schema"     // SchemaVersion, decimal
	keySeed       = root + "flow-seed"  // 16 bytes
	keyGeneration = root + "generation" // decimal
	keyVips       = root + "vips/"      // VipState
	keyPools      = root + "pools/"     // VipPool
	keyEndpoints  = root + "endpoints/" // <vip>/<protocol>-<port>: EndpointState
	keyDrainedMux = root + "drains/mux/"
	keyDrainedDIP = root + "drains/dip/" // <dip>/<vip>; vip "*": all
	keyNodes      = root + "nodes/"      // NodeState
	keyElection   = root + "election"
)

// Limits of the embedded member.
const (
	// Quota bounds the database's size in bytes: 20,000 endpoints take a tenth.
	Quota = 4 << 30
	// maxRequest bounds one transaction in bytes.
	maxRequest = 64 << 20
	maxTxnOps  = 100_000
	// leaseSeconds is how long the process may be stopped without losing the
	// election; a successor in the same directory does not wait for it.
	leaseSeconds = 60
	// compactEvery is how many revisions are kept at most; nothing reads old ones.
	compactEvery = 1000
	// commitTimeout bounds one transaction: fsync on a disk in trouble.
	commitTimeout = 30 * time.Second
)

// Errors of Commit after which the store is as it was before.
var (
	ErrTooLarge = errors.New("the change is too large for one transaction: apply it in parts")
	ErrNoSpace  = fmt.Errorf("the state database has reached its quota of %d GiB: delete objects, then restart the manager", Quota>>30)
)

// Config says where the state is.
type Config struct {
	Dir  string // created if need be
	Name string // this manager's
	Log  *slog.Logger
}

// Store is the state in etcd, held as leader.
type Store struct {
	log      *slog.Logger
	lock     *os.File
	etcd     *embed.Etcd
	client   *clientv3.Client
	session  *concurrency.Session
	election *concurrency.Election
	loud     atomic.Bool // etcd's log is passed on

	// failed ends when the store can't go on, with the cause.
	failed context.Context
	fail   context.CancelCauseFunc

	generationRev int64 // keyGeneration's mod revision; 0: absent
	sinceCompact  int
}

// Open starts the embedded member on cfg.Dir and waits until it is elected.
// The store fails as a whole: see Failed.
func Open(ctx context.Context, cfg Config) (_ *Store, err error) {
	s := &Store{log: cfg.Log}
	s.failed, s.fail = context.WithCancelCause(context.Background())
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	if s.lock, err = lockDir(cfg.Dir); err != nil {
		return nil, err
	}
	if err = s.start(ctx, cfg); err != nil {
		return nil, fmt.Errorf("open state in %s: %w", cfg.Dir, err)
	}
	s.client = v3client.New(s.etcd.Server)
	if err = s.checkSchema(ctx); err != nil {
		return nil, fmt.Errorf("open state in %s: %w", cfg.Dir, err)
	}
	if err = s.disarm(ctx); err != nil {
		return nil, fmt.Errorf("open state in %s: make room: %w", cfg.Dir, err)
	}
	if err = s.elect(ctx, cfg.Name); err != nil {
		return nil, fmt.Errorf("elect leader: %w", err)
	}
	if err = s.initialize(ctx); err != nil {
		return nil, fmt.Errorf("open state in %s: %w", cfg.Dir, err)
	}
	s.loud.Store(true)
	return s, nil
}

// lockDir makes dir and locks it against a second manager; etcd's own lock
// would wait for ever.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory (--data-dir): %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("write to data directory (--data-dir): %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock data directory %s: another manager runs on it", dir)
	}
	return f, nil
}

func (s *Store) start(ctx context.Context, cfg Config) error {
	c := embed.NewConfig()
	c.Name = cfg.Name
	c.Dir = filepath.Join(cfg.Dir, "etcd")
	c.InitialCluster = c.InitialClusterFromName(cfg.Name)
	if _, err := os.Stat(filepath.Join(c.Dir, "member")); err == nil {
		c.ClusterState = embed.ClusterStateFlagExisting
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// The client is in this process and there are no peers.
	c.ListenPeerUrls, c.ListenClientUrls, c.AdvertiseClientUrls = nil, nil, nil
	c.TickMs, c.ElectionMs = 20, 200
	c.QuotaBackendBytes = Quota
	c.MaxRequestBytes = maxRequest
	c.MaxTxnOps = maxTxnOps
	// Entries are large: keep few in memory and to replay.
	c.SnapshotCount, c.SnapshotCatchUpEntries = 500, 50
	c.WarningApplyDuration = time.Second
	c.WarningUnaryRequestDuration = 5 * time.Second
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(newLogger(cfg.Log, &s.loud, s.fail))

	type started struct {
		e   *embed.Etcd
		err error
	}
	done := make(chan started, 1)
	go func() {
		defer func() {
			// bbolt panics on a corrupt file.
			if p := recover(); p != nil {
				done <- started{err: fmt.Errorf("the state is corrupt: %v", p)}
			}
		}()
		e, err := embed.StartEtcd(c)
		done <- started{e, err}
	}()
	select {
	case d := <-done:
		if d.err != nil {
			return corrupt(d.err)
		}
		s.etcd = d.e
	case <-s.failed.Done():
		return corrupt(s.Err())
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-s.etcd.Server.ReadyNotify():
		return nil
	case <-s.failed.Done():
		return s.Err()
	case err := <-s.etcd.Err():
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// corrupt says of an error at the start what an operator can do about it.
func corrupt(err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), "no space left") {
		return err
	}
	return fmt.Errorf("%w: restore the directory from a copy, or start with an empty one and apply again", err)
}

// Failed is closed when the store can't go on: the disk failed, or another
// leader was elected. Err has the reason. The process must end; nothing is
// written any more.
func (s *Store) Failed() <-chan struct{} { return s.failed.Done() }

// Err is why the store failed, or nil.
func (s *Store) Err() error { return context.Cause(s.failed) }

func (s *Store) checkSchema(ctx context.Context) error {
	resp, err := s.client.Get(ctx, keySchema)
	if err != nil || len(resp.Kvs) == 0 {
		return err
	}
	v, err := strconv.ParseUint(string(resp.Kvs[0].Value), 10, 32)
	if err != nil {
		return fmt.Errorf("schema version %q: not a number: the state is corrupt", resp.Kvs[0].Value)
	}
	if v > SchemaVersion {
		return fmt.Errorf("the state has schema version %d and this manager knows up to %d: run the manager that wrote it, or a later one", v, SchemaVersion)
	}
	return nil
}

// disarm makes room after the quota was reached: etcd refuses writes until told
// otherwise.
func (s *Store) disarm(ctx context.Context) error {
	alarms, err := s.client.AlarmList(ctx)
	if err != nil {
		return err
	}
	for _, a := range alarms.Alarms {
		if a.Alarm != etcdserverpb.AlarmType_NOSPACE {
			return fmt.Errorf("etcd's alarm %s is raised: the state is corrupt", a.Alarm)
		}
		resp, err := s.client.Get(ctx, keySchema)
		if err != nil {
			return err
		}
		if _, err := s.client.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
			return err
		}
		if err := s.etcd.Server.Backend().Defrag(); err != nil {
			return err
		}
		if _, err := s.client.AlarmDisarm(ctx, (*clientv3.AlarmMember)(a)); err != nil {
			return err
		}
	}
	return nil
}

// elect becomes the leader. Keys that are left in the directory are removed
// first: who made them is dead, as this process holds the directory's lock.
func (s *Store) elect(ctx context.Context, name string) error {
	old, err := s.client.Get(ctx, keyElection+"/", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range old.Kvs {
		if _, err := s.client.Revoke(ctx, clientv3.LeaseID(kv.Lease)); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return err
		}
	}
	if s.session, err = concurrency.NewSession(s.client, concurrency.WithTTL(leaseSeconds)); err != nil {
		return err
	}
	s.election = concurrency.NewElection(s.session, keyElection)
	if err := s.election.Campaign(ctx, name); err != nil {
		return err
	}
	go func() {
		<-s.session.Done()
		s.fail(errors.New("the leader's lease expired: the disk under the data directory is too slow, or the process was stopped"))
	}()
	return nil
}

// initialize writes what an empty directory lacks.
func (s *Store) initialize(ctx context.Context) error {
	var seed [16]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return err
	}
	_, err := s.client.Txn(ctx).
		If(s.leads(), clientv3.Compare(clientv3.CreateRevision(keySchema), "=", 0)).
		Then(clientv3.OpPut(keySchema, strconv.Itoa(SchemaVersion)), clientv3.OpPut(keySeed, string(seed[:]))).
		Commit()
	return err
}

// Term is the leader's: the revision that made its election key. It only grows.
func (s *Store) Term() uint64 { return uint64(s.election.Rev()) }

// leads holds while this process is the leader.
func (s *Store) leads() clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(s.election.Key()), "=", s.election.Rev())
}

// Confirm commits an empty transaction guarded by the election key. Its error
// means that this process no longer leads and must do nothing further.
func (s *Store) Confirm(ctx context.Context) error {
	resp, err := s.client.Txn(ctx).If(s.leads()).Commit()
	if err == nil && !resp.Succeeded {
		err = errors.New("another leader was elected")
		s.fail(err)
	}
	return err
}

// State is everything that is kept.
type State struct {
	FlowSeed   []byte // 16 bytes
	Generation uint64
	Vips       map[string]*quartetv1.VipState
	Pools      map[string]*quartetv1.VipPool
	// Endpoints by VIP name, then "<protocol>-<port>".
	Endpoints map[string]map[string]*quartetv1.EndpointState
	// DrainedMuxes by name, DrainedDIPs by address and VIP name, "*" for all;
	// with the time of the drain.
	DrainedMuxes map[string]time.Time
	DrainedDIPs  map[[2]string]time.Time
	Nodes        map[string]*quartetv1.NodeState
}

// Load reads everything. An error names the key that could not be read.
func (s *Store) Load(ctx context.Context) (*State, error) {
	st := &State{
		Vips:         map[string]*quartetv1.VipState{},
		Pools:        map[string]*quartetv1.VipPool{},
		Endpoints:    map[string]map[string]*quartetv1.EndpointState{},
		DrainedMuxes: map[string]time.Time{},
		DrainedDIPs:  map[[2]string]time.Time{},
		Nodes:        map[string]*quartetv1.NodeState{},
	}
	const page = 2000
	var revision int64
	for key := root; ; {
		resp, err := s.client.Get(ctx, key, clientv3.WithRange(clientv3.GetPrefixRangeEnd(root)),
			clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return nil, fmt.Errorf("read state: %w", err)
		}
		revision = resp.Header.Revision
		for _, kv := range resp.Kvs {
			k := string(kv.Key)
			if err := st.add(k, kv.Value); err != nil {
				return nil, fmt.Errorf("read state: %s: %w: the state is corrupt", k, err)
			}
			if k == keyGeneration {
				s.generationRev = kv.ModRevision
			}
			key = k + "\x00"
		}
		if !resp.More {
			break
		}
	}
	if len(st.FlowSeed) != 16 {
		return nil, fmt.Errorf("read state: %s has %d bytes, not 16: the state is corrupt", keySeed, len(st.FlowSeed))
	}
	return st, nil
}

func (st *State) add(key string, value []byte) (err error) {
	switch {
	case key == keySchema, strings.HasPrefix(key, keyElection+"/"):
	case key == keySeed:
		st.FlowSeed = value
	case key == keyGeneration:
		st.Generation, err = strconv.ParseUint(string(value), 10, 64)
	case strings.HasPrefix(key, keyVips):
		v := &quartetv1.VipState{}
		err = proto.Unmarshal(value, v)
		st.Vips[key[len(keyVips):]] = v
	case strings.HasPrefix(key, keyPools):
		p := &quartetv1.VipPool{}
		err = proto.Unmarshal(value, p)
		st.Pools[key[len(keyPools):]] = p
	case strings.HasPrefix(key, keyEndpoints):
		vip, id, ok := strings.Cut(key[len(keyEndpoints):], "/")
		if !ok {
			return errors.New("no endpoint")
		}
		e := &quartetv1.EndpointState{}
		err = proto.Unmarshal(value, e)
		if st.Endpoints[vip] == nil {
			st.Endpoints[vip] = map[string]*quartetv1.EndpointState{}
		}
		st.Endpoints[vip][id] = e
	case strings.HasPrefix(key, keyDrainedMux):
		st.DrainedMuxes[key[len(keyDrainedMux):]], err = readTime(value)
	case strings.HasPrefix(key, keyDrainedDIP):
		dip, vip, _ := strings.Cut(key[len(keyDrainedDIP):], "/")
		st.DrainedDIPs[[2]string{dip, vip}], err = readTime(value)
	case strings.HasPrefix(key, keyNodes):
		n := &quartetv1.NodeState{}
		err = proto.Unmarshal(value, n)
		st.Nodes[key[len(keyNodes):]] = n
	default:
		return errors.New("unknown key")
	}
	return err
}

func readTime(value []byte) (time.Time, error) {
	var t time.Time
	err := t.UnmarshalText(value)
	return t, err
}

// Txn is one transaction: all of it is written or none. Of two writes of one
// key the later counts, as etcd takes only one.
type Txn struct {
	generation uint64
	ops        []clientv3.Op
	byKey      map[string]int // index into ops
	bytes      int
}

func (t *Txn) add(op clientv3.Op) {
	key := string(op.KeyBytes())
	t.bytes += len(key) + len(op.ValueBytes())
	if i, ok := t.byKey[key]; ok {
		t.bytes -= len(key) + len(t.ops[i].ValueBytes())
		t.ops[i] = op
		return
	}
	if t.byKey == nil {
		t.byKey = map[string]int{}
	}
	t.byKey[key] = len(t.ops)
	t.ops = append(t.ops, op)
}

func (t *Txn) put(key string, value []byte) { t.add(clientv3.OpPut(key, string(value))) }

func (t *Txn) putMessage(key string, m proto.Message) {
	// Only invalid UTF-8 can fail here, and no string gets this far with it.
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("marshal %s: %v", key, err))
	}
	t.put(key, b)
}

func (t *Txn) delete(key string) { t.add(clientv3.OpDelete(key)) }

// Generation makes the transaction one that takes the generation before it to
// generation; it fails if another has done so.
func (t *Txn) Generation(generation uint64) {
	t.generation = generation
	t.put(keyGeneration, strconv.AppendUint(nil, generation, 10))
}

// PutVip writes a VIP.
func (t *Txn) PutVip(v *quartetv1.VipState) { t.putMessage(keyVips+v.Vip.Name, v) }

// DeleteVip removes a VIP. Its endpoints are removed one by one.
func (t *Txn) DeleteVip(name string) { t.delete(keyVips + name) }

// PutPool writes a pool.
func (t *Txn) PutPool(p *quartetv1.VipPool) { t.putMessage(keyPools+p.Name, p) }

// DeletePool removes a pool.
func (t *Txn) DeletePool(name string) { t.delete(keyPools + name) }

// PutEndpoint writes the state of a VIP's endpoint, named "<protocol>-<port>".
func (t *Txn) PutEndpoint(vip, id string, e *quartetv1.EndpointState) {
	t.putMessage(keyEndpoints+vip+"/"+id, e)
}

// DeleteEndpoint removes the state of a VIP's endpoint.
func (t *Txn) DeleteEndpoint(vip, id string) { t.delete(keyEndpoints + vip + "/" + id) }

// DrainMux notes that a mux drains.
func (t *Txn) DrainMux(name string, at time.Time) { t.putTime(keyDrainedMux+name, at) }

// UndrainMux undoes DrainMux.
func (t *Txn) UndrainMux(name string) { t.delete(keyDrainedMux + name) }

// DrainDIP notes that a DIP drains behind one VIP, or behind all of them: "*".
func (t *Txn) DrainDIP(dip, vip string, at time.Time) { t.putTime(keyDrainedDIP+dip+"/"+vip, at) }

// UndrainDIP undoes DrainDIP.
func (t *Txn) UndrainDIP(dip, vip string) { t.delete(keyDrainedDIP + dip + "/" + vip) }

func (t *Txn) putTime(key string, at time.Time) {
	t.put(key, []byte(at.UTC().Format(time.RFC3339Nano)))
}

// PutNode writes what is known of a node.
func (t *Txn) PutNode(n *quartetv1.NodeState) { t.putMessage(keyNodes+n.Name, n) }

// DeleteNode forgets a node.
func (t *Txn) DeleteNode(name string) { t.delete(keyNodes + name) }

// Empty says that nothing would be written.
func (t *Txn) Empty() bool { return len(t.ops) == 0 }

// Commit writes a transaction and returns when it is on disk. ErrTooLarge and
// ErrNoSpace leave the store as it was; any other error leaves it unknown what
// was written, and the store fails.
func (s *Store) Commit(t *Txn) error {
	if t.bytes > maxRequest*3/4 || len(t.ops) > maxTxnOps {
		return ErrTooLarge
	}
	ctx, cancel := context.WithTimeout(s.failed, commitTimeout)
	defer cancel()
	guard := []clientv3.Cmp{s.leads()}
	if t.generation != 0 {
		guard = append(guard, clientv3.Compare(clientv3.ModRevision(keyGeneration), "=", s.generationRev))
	}
	resp, err := s.client.Txn(ctx).If(guard...).Then(t.ops...).Commit()
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return ErrNoSpace
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrTooManyOps):
		return ErrTooLarge
	case err == nil && !resp.Succeeded:
		err = errors.New("another leader was elected")
	}
	if err != nil {
		s.fail(err) // but for an earlier reason
		return fmt.Errorf("write state: %w", s.Err())
	}
	if t.generation != 0 {
		s.generationRev = resp.Header.Revision
	}
	if s.sinceCompact++; s.sinceCompact >= compactEvery {
		s.sinceCompact = 0
		if _, err := s.client.Compact(ctx, resp.Header.Revision); err != nil {
			s.log.Warn("state was not compacted", "error", err)
		}
	}
	return nil
}

// Dump is every key and value as stored, for comparing states.
func (s *Store) Dump(ctx context.Context) (map[string]string, error) {
	resp, err := s.client.Get(ctx, root, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for _, kv := range resp.Kvs {
		if k := string(kv.Key); !strings.HasPrefix(k, keyElection+"/") {
			all[k] = string(kv.Value)
		}
	}
	return all, nil
}

// Close gives up the leadership and stops the member. A store that has failed is
// left as it is, for etcd may hold its locks; the process must end.
func (s *Store) Close() error {
	if s.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := s.election.Resign(ctx)
	s.stop()
	return err
}

// stop ends what Open has started.
func (s *Store) stop() {
	if s.lock != nil {
		defer func() { _ = s.lock.Close() }()
	}
	if s.Err() != nil {
		return
	}
	s.fail(errors.New("the store is closed"))
	if s.session != nil {
		s.session.Orphan()
	}
	if s.client != nil {
		_ = s.client.Close() // a client without connections
	}
	if s.etcd != nil {
		s.etcd.Close()
	}
}
